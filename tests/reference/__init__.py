"""A plain torch EAGLE-3, independent of the product, that its tokens, trees and paths are compared with."""
