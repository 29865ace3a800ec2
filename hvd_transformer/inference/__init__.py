"""Using trained models: loading and exporting them, decoding, and predictions."""
