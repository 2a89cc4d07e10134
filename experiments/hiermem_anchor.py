"""Hierarchical memories, Table 1 with an anchor near its end: does a bank on a frozen anchor beat
going on with the anchor?

hiermem_table1.py's anchor has seen 3.5 tokens a parameter and learns much from more text. This one
has three times as many steps, 24.6M tokens, about once over all its text (of 24M tokens). The
second phase, 8.2M tokens, reads a third of that text again. The paper does not ask this; Table 1's
anchors have seen 1.1T tokens. One seed, two to four rates a row: "frozen 0.01" is the bank's,
"co-trained 0.0025" the anchor's, where the bank has 1e-2.
"""
from experiments.hiermem_table1 import cpu as phase
from experiments.hiermem_table1 import gpu as gpu_phase
from experiments.hiermem_table1 import prepare

model = "hiermem"
metric = "val_loss"
seeds = 1
cpu = dict(phase, skip_steps=6000)
gpu = dict(gpu_phase, skip_steps=3000)
anchor = dict(dense=True, max_iters=6000, skip_steps=0, eval_interval=750, warmup=200 / 6000)
on_gpu = dict(dense=True, max_iters=3000, skip_steps=0, eval_interval=375, warmup=100 / 3000)
later = dict(init_from="@anchor", weight_decay=1e-3)                    # A.2
variants = {"anchor": (dict(cpu=dict(anchor, learning_rate=5e-3), gpu=on_gpu), None)}


def slower(rate):
    """On a GPU: A.2's 1e-4 in place of 2.5e-3."""
    return dict(learning_rate=rate / 25, min_lr=rate / 250)


for rate in (3.125e-4, 6.25e-4, 1.25e-3, 2.5e-3):
    keys = dict(later, dense=True, learning_rate=rate, gpu=slower(rate))
    variants[f"continued {rate:g}"] = (keys, None)
for rate in (5e-3, 1e-2):
    keys = dict(later, memory="ffn", frozen=True, learning_rate=rate, gpu=slower(rate))
    variants[f"frozen {rate:g}"] = (keys, None)
for rate in (1.25e-3, 2.5e-3):
    keys = dict(later, memory="ffn", learning_rate=rate, memory_lr=round(1e-2 / rate, 4),
                gpu=slower(rate))
    variants[f"co-trained {rate:g}"] = (keys, None)
baseline = "anchor"
claims = ["continued 0.00125 > frozen 0.01", "continued 0.00125 > co-trained 0.00125"]
