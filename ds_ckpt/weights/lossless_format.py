"""Constants of the format of `lossless`, for CPUs and kernels."""

BLOCK = 1024
GROUP = 4
ESCAPE = 15
MAX_LOW_BITS = 8
FLAGS, UNCOMPRESSED = 1, 2
FLAG_WORDS = BLOCK // GROUP // 32
