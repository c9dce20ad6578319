"""A small Llama from end to end: made, tuned on chats with adapters in both frameworks, exported,
loaded by transformers, asked. A minute on one CPU core.

    python examples/finetune/finetune.py [FOLDER]
"""

import json
import random
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COLOURS = ["red", "green", "blue", "black", "white", "grey", "brown", "pink"]
THINGS = ["door", "car", "house", "boat", "chair", "table", "lamp", "book"]


def write_chats(file: Path) -> None:
    """400 chats about the colour of things, one a line."""
    chosen = random.Random(0)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(400):
            thing, colour = chosen.choice(THINGS), chosen.choice(COLOURS)
            ask = f"The {thing} is {colour}. What is the {thing}?"
            turns = [("user", ask), ("assistant", f"It is {colour}.")]
            row = {"messages": [{"role": role, "content": text} for role, text in turns]}
            out.write(json.dumps(row) + "\n")


def make_model(folder: Path, chats: Path) -> None:
    """A Llama with random weights, its tokenizer, and a chat template."""
    words: Any = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    learn = trainers.BpeTrainer(
        vocab_size=384, special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False
    )
    words.train([str(chats)], learn)
    torch.manual_seed(0)
    config: Any = LlamaConfig(
        vocab_size=words.get_vocab_size(), hidden_size=64, intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, eos_token_id=1,
        bos_token_id=0, pad_token_id=1, initializer_range=0.1,
    )  # fmt: skip
    net: Any = LlamaForCausalLM(config)
    net.save_pretrained(folder)
    words.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0],
             "eos_token": SPECIAL[1], "chat_template": TEMPLATE}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def run(*words: object) -> str:
    print("$", shlex.join(["python", "-m", *map(str, words)]), flush=True)
    done = subprocess.run([sys.executable, "-m", *map(str, words)], stdout=subprocess.PIPE,
                          text=True, check=True)  # fmt: skip
    return done.stdout


def last_loss(folder: Path) -> tuple[float, float]:
    """The validation loss before and after."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_bytes().splitlines()]
    losses = [row["val_loss"] for row in rows if row["kind"] == "eval"]
    return losses[0], losses[-1]


def answer(folder: Path, question: str) -> str:
    """transformers' own, word by word the likeliest."""
    words: Any = AutoTokenizer.from_pretrained(folder)
    net: Any = AutoModelForCausalLM.from_pretrained(folder)
    asked = [{"role": "user", "content": question}]
    given: Any = words.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
    ids = given if isinstance(given, torch.Tensor) else given["input_ids"]
    text = net.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                        max_new_tokens=16)  # fmt: skip
    return words.decode(text[0, ids.shape[1] :], skip_special_tokens=True)


def main(folder: Path) -> None:
    chats, llama = folder / "chats.jsonl", folder / "llama"
    write_chats(chats)
    make_model(llama, chats)
    question = "The door is green. What is the door?"
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    answers = {}
    for module in ("jax_impl.train", "torch_ref.train"):
        out, exported = folder / module, folder / f"{module}-hf"
        run(module, "--init", llama, "--data", chats, "--tokenizer", llama, "--lora-rank", 16,
            "--lora-alpha", 32, "--steps", 150, "--batch-size", 8, "--context", 64, "--lr", 1e-2,
            "--policy", "bf16", "--device", "cpu", "--eval-every", 150, "--eval-batches", 4,
            "--out", out)  # fmt: skip
        run("lockstep", "export", out, "--to", exported)
        first, last = last_loss(out)
        answers[module] = answer(exported, question)
        text = run(
            "lockstep", "sample", out, "--prompt", prompt, "--temperature", 0, "--length", 16
        )
        print(f"validation loss {first:.4f} -> {last:.4f}; {question} {answers[module]}")
        assert last < first / 4, "it learned nothing"
        assert answers[module] in text, f"transformers says {answers[module]!r}, lockstep {text!r}"
    print("both frameworks:", *answers.values())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
