#define ONNXFUSE_WISHES {0, 0, 0, 0}, {0, 0, 0, 0}, 12, 0
