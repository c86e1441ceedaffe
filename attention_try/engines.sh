#!/bin/bash
# Engines of small models with and without the fusions, compared and timed: results to $OUT/engines.json and $OUT/engines.log; 150 s at most
cd "$(dirname "$0")"; BUDGET=${BUDGET:-150} AUTO_LIMIT=${AUTO_LIMIT:-60} timeout 170 python3 engine_try.py "$@" 2>&1 | tee ${OUT:-.}/engines.log
