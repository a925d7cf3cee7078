"""From a bucket of gradients to the sums of their owners. A gradient's way, file by file:

    zero3.gradient  DeepSpeed's hook: which parameters a bucket holds, when a step has ended
    schedule        by DeepSpeed's own reduction, compressed, or uncompressed (`autotune` measures)
    exchange        residuals, packing, one all-to-all, the sum; factors of matrices in `low_rank`,
                    sums inside a host before it in `hierarchy`
    transport       packets, and what carries them; `virtual` between threads of one process

Beside it: `layout`, who owns what; `rules` and `plan`, which tensor travels how and in how many
bytes; `state`, what checkpoints keep; `build`, all of it from the settings.
"""
