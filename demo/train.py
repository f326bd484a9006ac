"""Trains the demo checkpoint from nothing: `python -m demo.train --out demo/checkpoint`."""

import argparse
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoTokenizer, LlavaForConditionalGeneration

from demo.architecture import (
    PATCHES,
    USED_VISION_LAYERS,
    VISION_WIDTH,
    fresh_model,
    load_model,
    save_weights,
    write_checkpoint,
)
from demo.batches import IGNORED, PATCH_CLASSES, Batch, BatchMaker, Encode, attention_mask
from demo.pictures import COLOURS, SHAPES

logger = logging.getLogger(__name__)

TRAINING_SEED = 1
HELD_OUT_SEED = 1_000_003
HELD_OUT_PICTURES = 48
WARM_UP_STEPS = 50
WORDS = (tuple(COLOURS), SHAPES, ("left", "right", "above", "below"))
WORD_KINDS = (0, 1, 4)  # of PATCH_CLASSES; class k + 1 has word k
WORD_LOSS = 0.3  # its weight
SHARPNESS = 10.0  # from likeness, -1 to 1, to logits
FINAL_SHARE = 0.05  # of the greatest rate, at the end of a stage


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training; rates are AdamW's greatest, num_patches are drawn from evenly."""

    name: str
    num_steps: int
    num_pictures: int
    num_patches: tuple[int, ...]
    num_shown: int  # of those the language model is shown at most so many
    vision_rate: float
    language_rate: float
    is_blind: bool = False  # the tower alone learns, what its patches show


STAGES = (
    Stage("vision", 1200, 64, (48, 72, 96), 0, 1.5e-3, 0.0, is_blind=True),
    Stage("joint", 2400, 16, (64, 72, 80), 28, 0.0, 1e-3),
    Stage("whole", 200, 8, (PATCHES,), PATCHES, 1.5e-4, 6e-4),
)


class Learner(nn.Module):
    """The model with a throw-away head that names what each patch shows."""

    def __init__(self, model: LlavaForConditionalGeneration, encode: Encode) -> None:
        """Trains `model` in place."""
        super().__init__()
        self.llava = model
        self.word_tokens = [[encode(f" {word}")[0] for word in words] for words in WORDS]
        self.patch_head = nn.Linear(VISION_WIDTH, sum(PATCH_CLASSES))

    def features(self, batch: Batch) -> torch.Tensor:
        """What the tower gives the projector for the batch's patches, (b, p, vision width)."""
        tower = self.llava.model.vision_tower
        embeddings = tower.embeddings
        content = functional.linear(batch.pixels, embeddings.patch_embedding.weight.flatten(1))
        hidden = content + embeddings.position_embedding(1 + batch.patches)
        first = embeddings.class_embedding + embeddings.position_embedding.weight[0]
        hidden = torch.cat([first.expand(len(hidden), 1, -1), hidden], dim=1)
        hidden = tower.pre_layrnorm(hidden)
        for layer in tower.encoder.layers[:USED_VISION_LAYERS]:
            hidden = layer(hidden, None)
        features: torch.Tensor = hidden[:, 1:]
        return features

    def patch_loss(self, features: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Mean cross entropy of the patches' classes, summed over their kinds."""
        kinds = self.patch_head(features).flatten(0, 1).float().split(PATCH_CLASSES, dim=1)
        true = batch.classes.flatten(0, 1)
        losses = [
            functional.cross_entropy(logits, true[:, kind], ignore_index=IGNORED) for kind, logits in enumerate(kinds)
        ]
        return torch.stack(losses).sum()

    def project(self, features: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The image tokens' embeddings, (b, q, language width)."""
        shown = features.gather(1, batch.shown[:, :, None].expand(-1, -1, VISION_WIDTH))
        pictures: torch.Tensor = self.llava.model.multi_modal_projector(shown)
        return pictures

    def word_loss(self, pictures: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Mean cross entropy of each patch's words by likeness of embeddings: its colour, shape and place."""
        words = functional.normalize(self.llava.model.language_model.embed_tokens.weight, dim=1)
        looks = functional.normalize(pictures.float(), dim=2).flatten(0, 1)
        classes = batch.classes.gather(1, batch.shown[:, :, None].expand(-1, -1, len(PATCH_CLASSES)))
        losses = []
        for kind, tokens in zip(WORD_KINDS, self.word_tokens, strict=True):
            true = classes[:, :, kind].flatten() - 1
            true = true.where((true >= 0) & (true < len(tokens)), IGNORED)
            logits = SHARPNESS * looks @ words[tokens].T
            total = functional.cross_entropy(logits, true, ignore_index=IGNORED, reduction="sum")
            losses.append(total / (true != IGNORED).sum().clamp(min=1))
        return torch.stack(losses).sum()

    def losses(self, batch: Batch, stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of the answers (zero in a blind stage), and that of what the patches show."""
        with torch.set_grad_enabled(stage.vision_rate > 0):
            features = self.features(batch)
        if stage.is_blind:
            return torch.zeros(()), self.patch_loss(features, batch)
        pictures = self.project(features, batch)
        true = batch.labels[batch.labels != IGNORED]
        return functional.cross_entropy(self.answer_logits(pictures, batch), true), self.word_loss(pictures, batch)

    def answer_logits(self, pictures: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Logits of the answers' tokens, in the order of `batch.labels`' true entries, (n, vocabulary)."""
        inner = self.llava.model
        words = inner.language_model.embed_tokens
        before = words(batch.prefix).expand(len(pictures), -1, -1)
        inputs = torch.cat([before, pictures.to(before.dtype), words(batch.tokens)], dim=1)
        hidden = inner.language_model(
            inputs_embeds=inputs,
            attention_mask=attention_mask(batch.segments),
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        hidden = hidden[:, -batch.tokens.shape[1] :]
        logits: torch.Tensor = self.llava.lm_head(hidden[batch.labels != IGNORED])
        return logits.float()


def _rate_share(step: int, num_steps: int) -> float:
    """The learning rate at `step` as a share of the greatest: a short rise, then a cosine."""
    rise = min(1.0, (step + 1) / WARM_UP_STEPS)
    fall = FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return rise * fall


def _optimiser(learner: Learner, stage: Stage) -> torch.optim.AdamW:
    inner = learner.llava.model
    vision = [*inner.vision_tower.parameters(), *learner.patch_head.parameters()]
    language = [
        *inner.multi_modal_projector.parameters(),
        *inner.language_model.parameters(),
        *learner.llava.lm_head.parameters(),
    ]
    groups = [{"params": vision, "lr": stage.vision_rate}, {"params": language, "lr": stage.language_rate}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01)


def answers_right(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Which answers are right to the last token, (answers,) bool; one row of logits per true label."""
    true = labels[labels != IGNORED]
    is_right = logits.argmax(dim=1) == true
    flat = labels.flatten()
    starts = ((flat != IGNORED) & (flat.roll(1) == IGNORED))[flat != IGNORED]
    answer = starts.cumsum(0) - 1
    wrong = torch.zeros(int(answer[-1]) + 1).index_add_(0, answer, (~is_right).float())
    return wrong == 0


@torch.no_grad()
def held_out_rate(learner: Learner, batches: list[Batch]) -> float:
    """The share of held-out answers that greedy decoding would give exactly, with all 576 tokens.

    Greedy decoding gives an answer exactly if, given its first tokens, each next one is the likeliest.
    """
    results = []
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            logits = learner.answer_logits(learner.project(learner.features(batch), batch), batch)
        results.append(answers_right(logits, batch.labels))
    return float(torch.cat(results).float().mean())


def train_stage(
    learner: Learner, stage: Stage, maker: BatchMaker, held_out: list[Batch], args: argparse.Namespace
) -> None:
    """Run one stage and write the weights as it goes."""
    optimiser = _optimiser(learner, stage)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate_share(step, stage.num_steps))
    parameters = list(learner.parameters())
    answer_mean, look_mean, start = 0.0, 0.0, time.monotonic()
    for step in tqdm(range(stage.num_steps), desc=stage.name, mininterval=10.0):
        num_patches = stage.num_patches[step % len(stage.num_patches)]
        batch = maker.draw(stage.num_pictures, num_patches, min(num_patches, stage.num_shown))
        with torch.autocast("cpu", torch.bfloat16):
            answer_loss, look_loss = learner.losses(batch, stage)
        loss = answer_loss + (1.0 if stage.is_blind else WORD_LOSS) * look_loss
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
        answer_mean += answer_loss.item()
        look_mean += look_loss.item()
        if (step + 1) % args.every == 0 or step + 1 == stage.num_steps:
            exact = 0.0 if stage.is_blind else held_out_rate(learner, held_out)
            save_weights(learner.llava, args.out)
            logger.info(
                "%s step %d/%d: answer loss %.4f, look loss %.4f, held-out exact %.3f, %.1f pictures/s",
                stage.name,
                step + 1,
                stage.num_steps,
                answer_mean / args.every,
                look_mean / args.every,
                exact,
                (step + 1) * stage.num_pictures / (time.monotonic() - start),
            )
            answer_mean = look_mean = 0.0


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--every", type=int, default=100, help="steps between log lines and saved weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stages", nargs="+", default=[stage.name for stage in STAGES], help="stages to run")
    parser.add_argument("--start-from", type=Path, help="checkpoint folder whose weights to go on from")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    model = fresh_model(TRAINING_SEED)
    write_checkpoint(model, args.out)
    if args.start_from:
        model.load_state_dict(load_model(args.start_from).state_dict())
    tokenizer = AutoTokenizer.from_pretrained(args.out)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    held_out_maker = BatchMaker(encode, HELD_OUT_SEED)
    held_out = [held_out_maker.draw(16, PATCHES, PATCHES, is_held_out=True) for _ in range(HELD_OUT_PICTURES // 16)]
    learner = Learner(model, encode)
    for index, stage in enumerate(STAGES):
        if stage.name in args.stages:
            train_stage(learner, stage, BatchMaker(encode, TRAINING_SEED + index), held_out, args)


if __name__ == "__main__":
    main()
