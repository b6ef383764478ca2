"""Settings of ONNX Runtime's sessions, the same where a bundle is measured and where it runs."""

SESSION_CONFIG = {
    # Weights of 8-bit floats become float32 when a graph is loaded; in every pass it would cost 20 times the product.
    "session.disable_quant_qdq": "1",
}
