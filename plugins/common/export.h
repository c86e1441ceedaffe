// Everything is compiled with hidden symbols. What this marks and exports.map lists is seen from outside.
#pragma once

#define ONNXFUSE_EXPORT __attribute__((visibility("default")))
