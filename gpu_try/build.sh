#!/bin/bash
# build.sh [NAME FLAGS]: compiles plugins/Recurrence and the driver's helpers into gpu_try/recurrence[NAME].bin (a shared library)
cd "$(dirname "$0")"; cu=${CU:-/work/main/.venv/lib/python3.11/site-packages/nvidia/cu13}; NAME=$1; shift; FLAGS="-DONNXFUSE_FAST $*"; mkdir -p obj$NAME
cc() { $cu/bin/nvcc -std=c++17 -O3 -gencode arch=compute_90,code=sm_90 --compress-mode=size -Xptxas -v -Xcompiler -fPIC,-fvisibility=hidden $FLAGS -c $1 -o obj$NAME/$2.o >obj$NAME/$2.log 2>&1 || { echo "FAILED $2"; grep -m 20 -E "error|fatal" obj$NAME/$2.log; return 1; }; }
build() { src=$1; o=$(basename $src .cu); newest=$(ls -t $src ../plugins/Recurrence/*.cuh ../plugins/Recurrence/*.h | head -1); [ obj$NAME/$o.o -nt $newest ] || cc $src $o; }
export -f build cc; export cu FLAGS NAME
printf '%s\n' ../plugins/Recurrence/*.cu helper.cu | xargs -P 2 -I{} bash -c 'build {}' || exit 1
g++ -shared -s -o recurrence$NAME.bin obj$NAME/*.o -L$cu/lib -lcudart_static -lrt -lpthread -ldl -static-libstdc++ -static-libgcc && ls -l recurrence$NAME.bin
grep -hE "spill|Used|Compiling" obj$NAME/*.log | grep -E -B1 -A1 "[1-9][0-9]* bytes (stack|spill)" | head -${LINES_SHOWN:-12}
