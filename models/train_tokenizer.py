"""Train the tokenizer of models/qwen3-tiny on the text of data/sft_en.jsonl.

    python models/train_tokenizer.py

A byte-level BPE with Qwen's special tokens and split rules, so the tiny model is fed the way a
real Qwen3 is. Writes tokenizer.json and tokenizer_config.json; the same data gives the same files.
The held-out file is left out: its text must stay unseen, also by the vocabulary.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data" / "sft_en.jsonl"
OUT = ROOT / "models" / "qwen3-tiny"
VOCAB_SIZE = 4096  # the embedding of config.json has exactly as many rows

# Padding, start of turn, end of turn. The two think marks are single tokens but ordinary text, as
# in Qwen3: decode(skip_special_tokens=True) keeps them.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINK = ["<think>", "</think>"]

# Qwen's rule: contractions, words with the space before them, one digit at a time, punctuation,
# line ends, spaces. There is no Unicode normalisation, so that decode(encode(text)) == text.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def training_text():
    """Yield every turn as the template will write it, so that role names become tokens too."""
    with DATA.open(encoding="utf-8") as lines:
        for line in lines:
            for message in json.loads(line)["messages"]:
                yield f"{message['role']}\n{message['content']}"


def main():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(THINK),
        min_frequency=2,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes: nothing is unknown
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in THINK])
    tokenizer.save(str(OUT / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the file as it is: Qwen's class adds NFC
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (OUT / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens -> {OUT}")


if __name__ == "__main__":
    main()
