"""Qwen language models as native Keras 3: load, fine-tune with `fit`, generate, save for the rest of the world."""
