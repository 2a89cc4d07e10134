"""Hierarchical memories, Figure 4b: of a given number of parameters at run time, how many to fetch?
The paper finds 1 for 10 of the anchor best.

Anchors of 7, 6, 5 and 4 layers (gpu: 35, 32, 28, 24), frozen, whose layers less are fetched
instead; the bank is as large for all. The paper's anchors go to 24 of 410M parameters. It has no
number for each point, and "flat" is an answer at a small size. "7 layers" has no memories, and "7
layers continued" is that anchor after as many tokens as the others' two phases.
"""
from experiments.hiermem_memories import cpu, gpu, prepare

model = "hiermem"
metric = "val_loss"
baseline = "7 layers"
seeds = 3
continued = dict(dense=True, init_from="@7 layers", cpu=dict(skip_steps=2000),
                 gpu=dict(skip_steps=1000))
variants = {"7 layers": (dict(dense=True), None), "7 layers continued": (continued, None)}
# The anchor's layers (cpu, gpu) and the bank's ranks (cpu, gpu): 3 L d (r_1 + r_2) is the layers
# left out, 3 L d (8 r_1 + 64 r_2) = 11.0M the bank (gpu: 3 L d (16 r_1 + 256 r_2) = 1.0B).
for layers, deep, ranks, gpu_ranks in (
        (6, 32, "45,69", "171,69"), (5, 28, "210,63", "586,54"), (4, 24, "457,55", "1139,35")):
    anchor = dict(dense=True, cpu=dict(depth=layers), gpu=dict(n_layer=deep))
    fetching = dict(init_from=f"@{layers} layers", frozen=True, weight_decay=1e-3, memory="ffn",
                    cpu=dict(depth=layers, ranks=ranks, skip_steps=2000),
                    gpu=dict(n_layer=deep, ranks=gpu_ranks, skip_steps=1000, learning_rate=1e-4,
                             min_lr=1e-5))
    variants[f"{layers} layers"] = (anchor, None)
    variants[f"{layers} layers fetching"] = (fetching, None)
claims = ["7 layers > 6 layers fetching",
          "4 layers fetching > 5 layers fetching > 6 layers fetching"]
