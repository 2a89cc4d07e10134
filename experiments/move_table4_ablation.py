"""MoVE, Table 4 (D12): the shared bank and the gate g_0 on the ordinary value, apart; only "MoVE
with g_0 is best" holds in every column."""
from experiments.move_table1 import cpu, gpu, prepare

model = "move"
metric = "val_bpb"
baseline = "LaVE x1"
seeds = 3
variants = {                                                    # overrides, the paper's D12 number
    "LaVE x1": (dict(memory="lave", memory_scale=1, gate_v=0), .8223),
    "LaVE x1 with g_0": (dict(memory="lave", memory_scale=1, gate_v=1), .8229),
    "MoVE x1 without g_0": (dict(memory="move", memory_scale=1, gate_v=0), .8229),
    "MoVE x1 with g_0": (dict(memory="move", memory_scale=1, gate_v=1), .8189),
    "LaVE x2": (dict(memory="lave", memory_scale=2, gate_v=0), .8182, 1),
    "LaVE x2 with g_0": (dict(memory="lave", memory_scale=2, gate_v=1), .8128, 1),
    "MoVE x2 without g_0": (dict(memory="move", memory_scale=2, gate_v=0), .8176, 1),
    "MoVE x2 with g_0": (dict(memory="move", memory_scale=2, gate_v=1), .8124, 1),
}
claims = []
for x in (1, 2):
    for other in (f"LaVE x{x}", f"LaVE x{x} with g_0", f"MoVE x{x} without g_0"):
        claims.append(f"{other} > MoVE x{x} with g_0")
