"""Hierarchical memories, Table 1: a bank fetched by topic lowers the loss; most when the anchor
goes on learning with it, less with a frozen anchor, least (but not in accuracy on specific
knowledge) when both start from scratch with all the tokens.

The paper's numbers are log perplexities of Wikipedia with fetched memories, rows A1, A3, A2, A4
(160M). Beside them two controls: the anchor trained on for the same tokens, and a plain model of
the same size at run time (a wider FFN). The memories are the defaults, 64,24 over 8,8, a fetch of
10% of the anchor. `python experiments/analysis.py retrieval` then gives the losses with other
memories than the fetched ones: the generic one, none, a wrong one, the one that the first 32
tokens ask for.

On a CPU the rates are the best of hiermem_rates.py. "Wider" and A4 have one schedule over all the
tokens, A2 and "A1 continued" two. "3 layers" is for `analysis.py rag`: with twice the tokens, its
text and a retrieved one, it does A2's work. A row with a bank is told which of 64 leaves a sequence
has, by up to 512 tokens around it. Being told is worth log(64) / 256 = 0.016 nats a token at most:
a mixture over all leaves, told nothing, would lose no more.
"""
from math import log

model = "hiermem"
metric = "val_loss"
baseline = "A1 anchor"
seeds = 3
prepare = dict(
    cpu="--source=fineweb_edu --tokenizer=bpe --vocab_size=4096 --max_tokens=30_000_000 "
        "--clusters=8,8 --out=data/fineweb_edu_8_8",
    gpu="--source=fineweb_edu --max_tokens=400_000_000 --clusters=16,16 "
        "--out=data/fineweb_edu_16_16")
cpu = dict(depth=7, n_embd=128, n_head=4, block_size=256, batch_tokens=4096, max_iters=2000,
           eval_interval=250, eval_tokens=131072, sample_tokens=0,
           warmup=0.1)                                          # 8.2M tokens a phase
gpu = dict(preset="openlm_160m", clusters="16,16", ranks="256,64", block_size=1024,
           batch_tokens=131072, max_iters=1000, eval_interval=125, warmup=0.1)
later = dict(init_from="@A1 anchor", weight_decay=1e-3,                 # A.2
             cpu=dict(skip_steps=2000, learning_rate=5e-3),
             gpu=dict(skip_steps=1000, learning_rate=1e-4, min_lr=1e-5))
memories = dict(later, memory="ffn")
frozen = dict(memories, frozen=True, cpu=dict(skip_steps=2000, learning_rate=1e-2))
co_trained = dict(memories, cpu=dict(later["cpu"], memory_lr=2.0))      # the bank's: 1e-2
from_scratch = dict(weight_decay=0.1, cpu=dict(max_iters=4000, learning_rate=1e-2, memory_lr=0.5),
                    gpu=dict(max_iters=2000, learning_rate=1e-3, min_lr=1e-5))
wider = dict(dense=True, cpu=dict(n_inner=600, max_iters=4000, learning_rate=1e-2),
             gpu=dict(n_inner=2368, max_iters=2000))
small = dict(dense=True, cpu=dict(depth=3, max_iters=4000, learning_rate=1e-2), gpu=None)
variants = {
    "A1 anchor": (dict(dense=True, cpu=dict(learning_rate=1e-2)), log(17.2)),
    "A1 continued": (dict(later, dense=True), None),
    "A3 frozen": (frozen, log(15.2)),
    "A2 co-trained": (co_trained, log(14.2)),
    "A4 from scratch": (from_scratch, log(15.6)),
    "wider": (wider, None),
    "3 layers": (small, None, 1),
}
claims = ["A1 anchor > A4 from scratch > A3 frozen > A2 co-trained", "A1 continued > A3 frozen",
          "A1 continued > A2 co-trained", "wider > A4 from scratch", "wider > A2 co-trained"]
