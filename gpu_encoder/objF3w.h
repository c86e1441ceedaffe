#define ONNXFUSE_WISHES {0, 0, 0, 0}, {0, 0, 0, 0}, 3, 0
