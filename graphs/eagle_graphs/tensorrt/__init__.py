"""Engines of TensorRT-RTX and TensorRT: built from standard ONNX, described, put into a bundle. Needs no torch."""
