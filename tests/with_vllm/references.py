"""Answers of transformers, from a process without vLLM: vLLM changes classes of transformers that it runs itself.

The process reads jobs, one line of JSON each, and writes the answers as lines.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch


class ReferenceProcess:
    """A process that loads one model after another."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, job: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the reference process ended: {self.process.wait()}")
        answers = json.loads(line)
        if "error" in answers:
            raise RuntimeError(answers["error"])
        return answers


@cache
def reference_process() -> ReferenceProcess:
    return ReferenceProcess()


def loaded(job: dict[str, Any]) -> Any:
    """The model with lancebill's experts, or with transformers' own."""
    import transformers

    import lancebill

    if job["own_experts"]:
        return transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    return lancebill.from_pretrained(Path(job["model"]), dtype=torch.float32, **job["options"])


def generated(model: Any, prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
    """Greedy tokens of each prompt, and their log-probabilities."""
    tokens, logprobs = [], []
    for prompt in prompts:
        with torch.no_grad():
            made = model.generate(
                torch.tensor([list(prompt)]),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        new = made.sequences[0, len(prompt) :].tolist()
        tokens.append(new)
        steps = [torch.log_softmax(logits[0].float(), -1) for logits in made.logits]
        logprobs.append([float(step[token]) for step, token in zip(steps, new, strict=True)])
    return {"tokens": tokens, "logprobs": logprobs}


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print too
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answers = generated(loaded(job), job["prompts"], job["count"])
        except Exception as error:  # the test that asked fails with it
            answers = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answers), file=out, flush=True)


if __name__ == "__main__":
    main()
