"""The shell `keras-qwen`. It uses the package as its users do, and starts without Keras."""
