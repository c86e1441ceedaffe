#define ONNXFUSE_WISHES {2, 2, 2, 4}, {0, 0, 0, 0}, 0, 0
