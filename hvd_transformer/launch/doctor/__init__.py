"""`hvd-transformer doctor`: one probe per host; their answers are compared and turned into findings."""
