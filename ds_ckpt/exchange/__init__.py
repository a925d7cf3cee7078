"""From a bucket of gradients to the sums of their owners.

exchange    residuals, packing, one all-to-all, the sum
transport   packets, and process groups; `virtual` between threads of one process
hierarchy   two levels: sums inside a node before it
low_rank    factors of matrices
metric      entries' weights in the optimizer's steps
layout      ownership of entries
rules       settings; which compressor a tensor gets; `assignment` with the bytes
state       files in checkpoints
"""
