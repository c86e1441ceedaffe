#!/bin/bash
# emulate.sh: the kernels on the host, gpu_try/libemulated.so
cd "$(dirname "$0")"; cu=${CU:-/work/main/.venv/lib/python3.11/site-packages/nvidia/cu13}; mkdir -p eobj; t=../tests/plugins
cc() { o=eobj/$(echo $1 | tr ./ __).o; [ $o -nt $1 ] && [ -z "$(find ../plugins $t -name '*.cuh' -newer $o -o -name '*.h' -newer $o)" ] && exit 0
g++ -std=c++17 -O2 -g1 -fPIC -fno-strict-aliasing  -isystem $cu/include -I$t -include $t/emulator.h -x c++ -c $1 -o $o 2>$o.log || { rm -f $o; grep -m 12 error $o.log; exit 255; }; }
export -f cc; export cu t
printf '%s\n' ../plugins/{DepthwiseConvLayerNorm,GroupNormSilu,Linear}/*.cu $t/emulator.cpp | xargs -P 2 -I{} bash -c 'cc {}' || exit 1
g++ -shared -o libemulated.so eobj/*.o && ls -l libemulated.so
