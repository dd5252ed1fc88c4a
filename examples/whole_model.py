"""A whole model through transformers, with 4-bit experts and 8-bit matrices everywhere else.

    python examples/whole_model.py PATH "The sea was calm that morning, and"

Continues the text; `lancebill generate` also applies the chat template, and prints the answer as it comes.
"""

import sys

from transformers import AutoTokenizer

import lancebill

if len(sys.argv) < 3:
    sys.exit(__doc__)
path, prompt = sys.argv[1], sys.argv[2]
model = lancebill.from_pretrained(path, weights={"experts": "mxfp4", "rest": "int8"})
print(model.lancebill_reports())
print(model.lancebill_rest)

tokenizer = AutoTokenizer.from_pretrained(path)
answer = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=16)
print(tokenizer.decode(answer[0], skip_special_tokens=True))
