"""MIDUS, Table 1, SFT: HML is still ahead after supervised fine-tuning of all parameters.

Starts from rows of midus_rates.py; nearly an epoch of instructions with answers, a window each.
val_loss is that of held-out answers alone, in nats a token; the paper's columns are others. The
paper's rate is a tenth of its CPT's; here it is a quarter, for the run is short. HML's values keep
their 30 times, and where they were annealed they are again.
data/instruct.jsonl.xz is a file of records like Alpaca's.
"""
model = "midus"
metric = "val_loss"
baseline = "MIDUS-HML"
seeds = 1
instruct = "experiments/instruct.py --source=data/instruct.jsonl.xz"
prepare = dict(cpu=f"{instruct} --tokenizer=data/humanities/tokenizer.json --out=data/sft",
               gpu=f"{instruct} --tokenizer=data/humanities_gpu/tokenizer.json --out=data/sft_gpu")
cpu = dict(phase="sft", batch_tokens=4096, max_iters=450, eval_interval=150, eval_tokens=65536,
           sample_tokens=0, learning_rate=5e-4)
gpu = dict(cpu, batch_tokens=65536, max_iters=30, eval_interval=10, learning_rate=1e-5)
variants = {
    "MIDUS-HML": (dict(init_from="@midus_rates/MIDUS-HML values 30x 0.002"), None),
    "MIDUS-HML annealed": (
        dict(init_from="@midus_rates/MIDUS-HML values 30x annealed 0.002"), None),
    "Llama Pro": (dict(init_from="@midus_rates/Llama Pro 0.002"), None),
    "base continued": (dict(init_from="@midus_rates/base continued 0.002"), None),
}
claims = ["Llama Pro > MIDUS-HML", "base continued > MIDUS-HML",
          "Llama Pro > MIDUS-HML annealed"]
