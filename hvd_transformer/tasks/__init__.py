"""What is trained: language modelling, translation, classification, fine-tuning, and user-defined tasks."""
