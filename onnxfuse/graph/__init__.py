"""Reading, writing, cleaning and converting models. onnx-graphsurgeon's Graph is the graph type throughout."""
