"""The main job on one page: fine-tune a Qwen model on chats with `fit`, look at it, save it, load it again."""
