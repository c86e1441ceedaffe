#!/bin/bash
# emulate.sh: the same kernel on the host, gpu_try/libemulated.so
cd "$(dirname "$0")"; cu=${CU:-/work/main/.venv/lib/python3.11/site-packages/nvidia/cu13}; mkdir -p eobj; t=../tests/plugins
cc() { g++ -std=c++17 -O2 -g -fPIC -fno-strict-aliasing -isystem $cu/include -I$t -include $t/emulator.h -x c++ -c $1 -o eobj/$(basename $1).o 2>eobj/$(basename $1).log || { grep -m 12 error eobj/$(basename $1).log; return 1; }; }
export -f cc; export cu t
printf '%s\n' ../plugins/EncoderLayer/*.cu pack.cu $t/emulator.cpp | xargs -P 2 -I{} bash -c 'cc {}' || exit 1
g++ -shared -o libemulated.so eobj/*.o && ls -l libemulated.so
