"""MoVE, Table 3 with a wider latent: is a memory inside latent attention worth more where more
passes through?

At a width of 256 the paper's latent of d/32 has 8 numbers, and in move_table3_mla.py no memory
gains more than noise. Here it has d/4. The paper has no such rows. Rates of the banks are the best
of that table. With "plain keys" keys are read from the latent as it was, and only values from what
the memory makes of it. "Normed": the latent is normed before the memory, as in DeepSeek-V2.
"""
from experiments.move_table1 import bank, cpu, gpu, prepare

model = "move"
metric = "val_bpb"
baseline = "MLA d/4"
seeds = 1
latent = dict(attention="mla", cpu=dict(d_c=64), gpu=dict(d_c=192))
variants = {
    "MLA d/4": (dict(latent, dense=True), None),
    "MoVE x1 d/4": (dict(latent, **bank("MoVE x1"), memory_lr=1 / 4), None),
    "LaVE x1 d/4": (dict(latent, **bank("LaVE x1"), memory_lr=1 / 4), None),
    "MoVE x8 d/4": (dict(latent, **bank("MoVE x8"), memory_lr=1 / 16), None),
}
for name in ("MoVE x8", "MoVE x1"):
    keys = dict(variants[f"{name} d/4"][0], plain_keys=True)
    variants[f"{name} d/4 plain keys"] = (keys, None)
for name in ("MLA", "MoVE x1"):
    flags = dict(variants[f"{name} d/4"][0], latent_norm=True)
    variants[f"{name} d/4 normed"] = (flags, None)
claims = ["MLA d/4 > MoVE x1 d/4", "MLA d/4 > LaVE x1 d/4", "MLA d/4 > MoVE x8 d/4",
          "MoVE x1 d/4 > MoVE x8 d/4", "MLA d/4 > MoVE x1 d/4 plain keys",
          "MLA d/4 > MoVE x8 d/4 plain keys", "MLA d/4 normed > MoVE x1 d/4 normed",
          "MLA d/4 > MLA d/4 normed"]
