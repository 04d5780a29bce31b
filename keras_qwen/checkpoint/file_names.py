"""What the files of a checkpoint are called, on the Hub and in a folder."""

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
WEIGHTS_NAME = "model.safetensors"  # when one file holds all weights
INDEX_NAME = "model.safetensors.index.json"  # when several do: {"weight_map": {tensor: file}}
ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)

COMPANION_FILES = (GENERATION_CONFIG_NAME, *TOKENIZER_FILES)  # these travel with the weights, byte for byte
