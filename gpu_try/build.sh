#!/bin/bash
# build.sh [NAME]: compiles the kernels and the driver's helpers into gpu_try/epilogues[NAME].bin (a shared library); FLAGS: more for nvcc
cd "$(dirname "$0")"; cu=${CU:-/work/main/.venv/lib/python3.11/site-packages/nvidia/cu13}; O=obj$1; mkdir -p $O
cc() { o=$O/$(echo $1 | tr ./ __).o; [ $o -nt $1 ] && [ -z "$(find $(dirname $1) ../plugins/common ../plugins/BiasGelu -name '*.cuh' -newer $o -o -name '*.h' -newer $o)" ] && exit 0
$cu/bin/nvcc -std=c++17 -O3 $FLAGS -gencode arch=compute_90a,code=sm_90a --compress-mode=size -Xptxas -v -Xcompiler -fPIC,-fvisibility=hidden -c $1 -o $o >$o.log 2>&1 || { rm -f $o; echo FAILED $1; grep -m 12 -E "error|fault" $o.log; exit 255; }; }
export -f cc; export cu FLAGS O
printf '%s\n' ../plugins/{DepthwiseConvLayerNorm,GroupNormSilu,Linear}/*.cu helper.cu | xargs -P 2 -I{} bash -c 'cc {}' || exit 1
g++ -shared -s -o epilogues$1.bin $O/*.o -L$cu/lib -lcudart_static -lrt -lpthread -ldl -static-libstdc++ -static-libgcc && ls -l epilogues$1.bin
grep -hE "spill|Used|Compiling" $O/*.log | grep -E -B1 -A1 "[1-9][0-9]* bytes (stack|spill)" | head -${LINES_SHOWN:-30}
