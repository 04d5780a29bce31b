"""`python -m keras_qwen.cli`: the shell."""

from keras_qwen.cli.app import main

main()
