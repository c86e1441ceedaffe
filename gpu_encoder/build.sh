#!/bin/bash
# build.sh [NAME [SHAPE [FLAGS]]]: compiles plugins/EncoderLayer and the driver's helpers into encoder[NAME].bin, a shared library.
# SHAPE: batch, sequence, width, inner, heads, cluster, clusters, shared memory: a kernel for that alone; empty: for any.
cd "$(dirname "$0")"; cu=${CU:-/work/main/.venv/lib/python3.11/site-packages/nvidia/cu13}; NAME=$1; SHAPE=$2; shift 2; FLAGS="$*"; mkdir -p obj$NAME
if [ "$SHAPE" ]; then echo "#define ONNXFUSE_FIXED $SHAPE" >obj$NAME/shape.h; FLAGS="$FLAGS --expt-relaxed-constexpr -include obj$NAME/shape.h"; fi
cc() { $cu/bin/nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a --compress-mode=size -Xptxas -v -Xcompiler -fPIC,-fvisibility=hidden $FLAGS -c $1 -o obj$NAME/$2.o >obj$NAME/$2.log 2>&1 || { echo "FAILED $2"; grep -m 20 -E "error|fatal" obj$NAME/$2.log; return 1; }; }
build() { cc $1 $(basename $1 .cu); }
export -f build cc; export cu FLAGS NAME
printf "%s\n" ../plugins/EncoderLayer/*.cu pack.cu helper.cu | xargs -P 2 -I{} bash -c "build {}" || exit 1
g++ -shared -s -o encoder$NAME.bin obj$NAME/*.o -L$cu/lib -lcudart_static -lrt -lpthread -ldl -static-libstdc++ -static-libgcc && ls -l encoder$NAME.bin
grep -hE "spill|Used|Compiling|C75" obj$NAME/*.log | grep -v C7519
