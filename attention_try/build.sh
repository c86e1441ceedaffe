#!/bin/bash
# build.sh: compiles plugins/FusedAttention and the driver's helpers into attention.bin (a shared library for sm_90), and copies the driver to the GPU's folder
cd "$(dirname "$0")"; cu=${CU:-/work/main/.venv/lib/python3.11/site-packages/nvidia/cu13}; mkdir -p obj
cc() { o=obj/$(basename $1 .cu); newest=$(ls -t $1 ../plugins/FusedAttention/*.cuh ../plugins/FusedAttention/*.h ../plugins/common/*.cuh | head -1); [ $o.o -nt $newest ] || nice $cu/bin/nvcc -std=c++17 -O3 -gencode arch=compute_90,code=sm_90 -Xptxas -v -Xcompiler -fPIC,-fvisibility=hidden -c $1 -o $o.o >$o.log 2>&1 || { echo "FAILED $1"; grep -m 20 -E "error|fatal" $o.log; return 1; }; }
export -f cc; export cu
printf '%s\n' ../plugins/FusedAttention/*.cu helper.cu | xargs -P 2 -I{} bash -c 'cc {}' || exit 1
g++ -shared -s -o attention.bin obj/*.o -L$cu/lib -lcudart_static -lrt -lpthread -ldl -static-libstdc++ -static-libgcc && ls -l attention.bin
grep -hE "spill|Used|Compiling" obj/*.log | grep -E -B1 -A1 "[1-9][0-9]* bytes (stack|spill)" | head -12
to=/work/main/.gpu/try/attention; mkdir -p $to && cp attention.bin try.py $to/ && cp ../tests/plugins/attentions.py ../tests/plugins/kernels.py $to/
cp run.sh $to/
