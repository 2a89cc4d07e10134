"""Hierarchical memories, Figure 4b: of a given number of parameters at run time, how many to fetch?
The paper finds 1 for 10 of the anchor best.

Anchors of 7, 6, 5 and 4 layers (gpu: 35, 32, 28, 24), frozen, that fetch what they are smaller by:
1 number for 12.7, 8.0, 3.5 and 2.0 of the anchor on a CPU. The one of 7 layers has narrower FFNs.
The bank is as large for all. The paper's anchors have 12 to 24 layers. It has no number for
each point, and "flat" is an answer at a small size. "7 layers continued" is hiermem_table1.py's
anchor after as many tokens as the others' two phases. The paper warns that the ratio may be another
one where anchor and bank learn together: "co-trained" asks that at both ends. Rates and decay are
hiermem_table1.py's, and fall by a cosine (A.7: anchors at 1e-3, memories at 1e-4 to the end).
"""
from experiments.hiermem_memories import cpu, gpu, prepare
from experiments.hiermem_table1 import variants as table1

model = "hiermem"
metric = "val_loss"
baseline = "7 layers continued"
seeds = 3
continued = dict(table1["A1 continued"][0], init_from="@hiermem_table1/A1 anchor")
variants = {"7 layers continued": (continued, None)}
# The anchor (cpu, gpu) and the bank's ranks (cpu, gpu): 3 L d (r_1 + r_2) is what the anchor is
# smaller by, 3 L d (8 r_1 + 64 r_2) = 11.0M the bank (gpu: 3 L d (16 r_1 + 256 r_2) = 1.0B).
for name, on_cpu, on_gpu, ranks, gpu_ranks in (
        ("narrow", dict(depth=7, n_inner=448), None, "0,64", ""),
        ("6 layers", dict(depth=6), dict(n_layer=32), "45,69", "171,69"),
        ("5 layers", dict(depth=5), dict(n_layer=28), "210,63", "586,54"),
        ("4 layers", dict(depth=4), dict(n_layer=24), "457,55", "1139,35")):
    later = dict(on_cpu, ranks=ranks, skip_steps=2000)
    later_gpu = None
    if on_gpu:
        later_gpu = dict(on_gpu, ranks=gpu_ranks, skip_steps=1000, learning_rate=1e-4, min_lr=1e-5)
    keys = dict(init_from=f"@{name}", weight_decay=1e-3, memory="ffn", gpu=later_gpu)
    frozen = dict(keys, frozen=True, cpu=dict(later, learning_rate=1e-2))
    both = dict(keys, cpu=dict(later, learning_rate=5e-3, memory_lr=2.0))
    variants[name] = (dict(dense=True, cpu=dict(on_cpu, learning_rate=1e-2), gpu=on_gpu), None)
    variants[f"{name} fetching"] = (frozen, None)
    if name in ("narrow", "4 layers"):
        variants[f"{name} co-trained"] = (both, None, 1)
claims = ["7 layers continued > 6 layers fetching",
          "4 layers fetching > 5 layers fetching > 6 layers fetching",
          "4 layers co-trained > narrow co-trained"]
