"""The tokenizer of the demo model: byte-level BPE, so that any text has tokens."""

import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from demo.pictures import draw_scene
from demo.questions import ask, text_questions

VOCABULARY = 1024
MAX_POSITIONS = 2048
PAD, START, END, IMAGE = "<pad>", "<s>", "</s>", "<image>"
SCENES = 3000  # scenes whose questions the merges are learnt from

# GPT-2's split (https://github.com/openai/gpt-2/blob/master/src/encoder.py), digits one by one.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Common words, so that text other than the questions is not all single bytes.
COMMON_TEXT = """
the of and a to in is you that it he was for on are as with his they I at be this have from or one had by
word but not what all were we when your can said there use an each which she do how their if will up
other about out many then them these so some her would make like him into time has look two more write go
see number no way could people my than first water been call who oil its now find long down day did get
come made may part over new sound take only little work know place year live me back give most very after
thing our just name good sentence man think say great where help through much before line right too mean
old any same tell boy follow came want show also around form three small set put end does another well
large must big even such because turn here why ask went men read need land different home us move try
kind hand picture again change off play spell air away animal house point page letter mother answer found
study still learn should world image photo left right above below please describe explain write short
long story list words user assistant system hello thanks
"""

# As llava-hf's, but a past answer ends in `</s>`: so the model was trained, and so it ends an answer itself.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['content'] is string -%}
{%- set parts = [{'type': 'text', 'text': message['content']}] -%}
{%- else -%}
{%- set parts = message['content'] -%}
{%- endif -%}
{%- if message['role'] != 'system' -%}{{ message['role'].upper() + ': ' }}{%- endif -%}
{%- for part in parts if part['type'] in ['image', 'image_url'] -%}{{ '<image>\\n' }}{%- endfor -%}
{%- for part in parts if part['type'] == 'text' -%}
{{ part['text'] + ('' if loop.last else ' ') }}
{%- endfor -%}
{{ '</s>' if message['role'] == 'assistant' else ' ' }}
{%- endfor -%}
{{ 'ASSISTANT:' if add_generation_prompt else '' }}
"""


def _corpus() -> list[str]:
    chance = random.Random(0)
    lines = [COMMON_TEXT.replace("\n", " ")]
    for question in text_questions():
        lines += [f"USER: {question.text} ASSISTANT: {question.answer}"] * 20
    for _ in range(SCENES):
        lines += [f"USER: \n{q.text} ASSISTANT: {q.answer}" for q in ask(draw_scene(chance), chance)]
    return lines


def train_tokenizer() -> Tokenizer:
    """A tokenizer of at most `VOCABULARY` tokens that puts `<s>` before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END, IMAGE],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A",
        pair=f"{START} $A {START} $B",
        special_tokens=[(START, tokenizer.token_to_id(START))],
    )
    return tokenizer
