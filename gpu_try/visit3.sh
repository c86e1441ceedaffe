#!/bin/bash
# visit3.sh: the sanitizers on small cases (about 90 s, in the background of nothing else), the kernels (40 s), the fused engines (90 s). $OUT: where all goes.
# PARTS: which of them, "sanitize kernels engines". ENGINES: folders with the engines' models, joined by ':'.
cd "$(dirname "$0")"; export OUT=${OUT:-/tmp/out}; mkdir -p $OUT; parts=${PARTS:-sanitize kernels engines}
case "$parts" in *sanitize*)
  for a in "0 1 0" "0 0 1" "0 0 0" "0 1 1" "1 1 0" "1 0 0"; do echo "== bulk $a"; timeout 15 compute-sanitizer --tool memcheck --print-limit 2 ./bulk.bin $a 2>&1 | grep -v "Host Frame"; done >$OUT/bulk.log 2>&1 &
  BUDGET=${SANITIZE:-90} timeout 110 python3 sanitize.py >$OUT/sanitize.log 2>&1; wait; cat $OUT/sanitize.log;; esac
case "$parts" in *kernels*) BUDGET=${KERNELS:-40} timeout 55 python3 try.py >$OUT/try.log 2>&1; tail -70 $OUT/try.log;; esac
case "$parts" in *engines*) AUTO=${AUTO:-0} BUDGET=${ENGINE_SECONDS:-90} timeout 110 python3 engine_try.py t100 t60 t200 gru_reset_first states_lengths lstm_2x512_dynamic lstm_1x1024 deepf aecmos gru_1x256_dyn >$OUT/engine_try.log 2>&1; cat $OUT/engine_try.log;; esac
date >$OUT/visit3.done
