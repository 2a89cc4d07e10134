"""UltraMemV2, Table 3: at equal active and total parameters Memory+ > UltraMem > UltraMemV2 in loss, and the last on a par with a mixture of experts.

The sizes of every memory follow from the shape (Config's automatic values): a token's work is that of the dense model's FFN of 4d, the total that of
64 experts of which 8 are used. UltraMemV2's D_v = D_p = d/4 and 32 values in each layer are Table 10's, so that it reads as many numbers a token as UltraMem.
The dense model has the active parameters alone. PKM and PEER are not in the paper's table. The paper's numbers are evaluation losses at 227M active of
1.2B after 500B tokens; it says that UltraMemV2 starts slowly, and calls it on a par with the mixture of experts. With 4 layers Memory+ and PKM have a memory
in each, UltraMem in three: at this depth the few layers of the older memories are not few. The learning rate is the published one (times 3 at width 256;
Memory+'s values stay at 1e-3), the best of those that have run in ultramem_rates.py. At three times that the memories after the first layer go off, with
outputs of 0.000 to 0.4 beside the FFN's 4 to 18, while MoE's experts gain 0.13 nats and the dense model loses 0.24.
"silu" rows start as large as the FFN: as it is, UltraMemV2 starts 1.8 times larger (its derivation takes the SwiGLU's SiLU for a normal variable cut
off at 0), and OLMoE, whose eight gates do not sum to 1, 26 times smaller. Values learn at the others' rate, as the paper advises in the end (4.2.9);
the commands published with these rows begin with four times that, for UltraMem and for V2, falling to the others' rate over the whole run: "values 4x".
Muon, which is far ahead for the dense model, takes no experts or values, so that it would favour whoever has fewer of them."""
model, metric, baseline, seeds = "ultramem", "val_loss", "dense", 3
prepare = dict(cpu="--source=fineweb_edu --tokenizer=bpe --vocab_size=4096 --max_tokens=20_000_000 --out=data/fineweb_edu_bpe4096",
               gpu="--source=fineweb_edu --max_tokens=200_000_000 --out=data/fineweb_edu_200M")
cpu = dict(depth=4, block_size=256, batch_size=4, batch_tokens=1024, max_iters=1024, eval_interval=256, eval_tokens=131072, sample_tokens=0,
           schedule="wsd", learning_rate=4e-4)                                                        # 1.05M tokens
gpu = dict(depth=12, block_size=1024, batch_tokens=131072, max_iters=1000, eval_interval=200)                                             # 131M tokens
variants = {
    "dense": (dict(dense=True), None),
    "UltraMemV2": (dict(cpu=dict(value_dim=64, pre_value_dim=64), gpu=dict(value_dim=192, pre_value_dim=192)), 2.853),
    "UltraMemV2 values 4x": (dict(value_lr=4.0, value_lr_until=1.0, cpu=dict(value_dim=64, pre_value_dim=64), gpu=dict(value_dim=192, pre_value_dim=192)), None),
    "UltraMemV2 silu": (dict(init_match="silu", cpu=dict(value_dim=64, pre_value_dim=64), gpu=dict(value_dim=192, pre_value_dim=192)), None),
    "MoE-8": (dict(memory="moe"), 2.845), "MoE-8 silu": (dict(memory="moe", init_match="silu"), None),
    "UltraMem": (dict(memory="ultramem"), 2.885), "UltraMem values 4x": (dict(memory="ultramem", value_lr=4.0, value_lr_until=1.0), None),
    "Memory+": (dict(memory="memory+"), 2.920),
    "PKM": (dict(memory="pkm"), None),
    "PEER": (dict(memory="peer"), None),
}
claims = ["Memory+ > UltraMem > UltraMemV2 > MoE-8", "dense > UltraMemV2", "dense > MoE-8", "PKM > UltraMemV2", "PEER > UltraMemV2",
          "UltraMem > UltraMem values 4x", "UltraMemV2 > UltraMemV2 values 4x", "UltraMem values 4x > UltraMemV2 values 4x",
          "dense > UltraMem values 4x", "dense > UltraMemV2 values 4x", "UltraMemV2 > UltraMemV2 silu", "MoE-8 > MoE-8 silu",
          "UltraMemV2 silu > MoE-8 silu", "dense > UltraMemV2 silu", "dense > MoE-8 silu"]
