#!/bin/bash
# The command for the GPU, 28 s at most: results to $OUT/attention.json and $OUT/attention.log
cd "$(dirname "$0")"; BUDGET=${BUDGET:-28} timeout 40 python3 try.py "$@" 2>&1 | tee ${OUT:-.}/attention.log
