"""Which jobs start where: a pure function from what there is to what to do."""
