"""What is trained: language modelling, translation, classification, fine-tuning, and tasks of one's own."""
