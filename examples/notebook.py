# %% [markdown]
# # A picture, from upload to tokens
#
# Cells as in a notebook: VS Code, Spyder and `jupytext` open this file as one, and `python examples/notebook.py` runs
# it from top to bottom. Start `vlm-relay up` first; the first argument is another server's gRPC address.

# %% What is needed, and the server
import sys
from collections import Counter
from pathlib import Path

from client import RelayClient

ARGUMENTS = [word for word in sys.argv[1:] if not word.startswith("-")]  # a notebook's kernel has its own
SERVER = ARGUMENTS[0] if ARGUMENTS and ":" in ARGUMENTS[0] else "127.0.0.1:8001"
FOLDER = Path("demo") if Path("demo/picture.jpg").exists() else Path("../demo")  # notebooks run beside themselves
PICTURE = FOLDER / "picture.jpg"

client = RelayClient(SERVER, retries=3)
print("ready:", client.is_ready())

# %% One question, and what it took
answer = client.ask("What is in the picture?", images=[PICTURE], max_tokens=20, return_decision=True)
print("answer:", answer.text.strip())
print(f"{answer.num_input_tokens} tokens in, {answer.num_output_tokens} out, first after {answer.ttft_s * 1000:.0f} ms")

# %% Where the scheduler placed it, and why
print("placed:", answer.decision["reason"])

# %% [markdown]
# The same picture again finds its embedding in the store: nothing is encoded, and the first token comes sooner.
# `on_progress` tells each step before the text.

# %% The answer as it comes
steps = []
with client.stream(
    "How many objects are there?", images=[PICTURE], max_tokens=20, on_progress=lambda step: steps.append(step.stage)
) as stream:
    pieces = [chunk.text for chunk in stream]
print("steps:", ", ".join(steps))
print("streamed:", "".join(pieces).strip())

# %% How sure the model is: the likeliest tokens at each place
sure = client.ask("What colour is the circle?", images=[PICTURE], max_tokens=3, logprobs=3)
for place, alternatives in enumerate(sure.logprobs):
    print(f"token {place}:", ", ".join(f"{each.text!r} {each.logprob:.2f}" for each in alternatives))

# %% The same question several times: at a temperature answers may differ, and a seed makes one come again
drawn = [
    client.ask("What is in the picture?", images=[PICTURE], temperature=2.5, seed=seed, max_tokens=12).text.strip()
    for seed in (1, 2, 3, 1)
]
for text, times in Counter(drawn).most_common():
    print(f"drawn {times} x: {text!r}")
assert drawn[0] == drawn[3]

# %% Done
client.close()
