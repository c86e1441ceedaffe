#define ONNXFUSE_WISHES {4, 4, 4, 4}, {0, 0, 0, 0}, 0, 0
