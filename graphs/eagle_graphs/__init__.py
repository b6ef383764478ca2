"""The contract that exporter and runtime share: ports, trees, profiles, the manifest, the attention op."""

from eagle_graphs.errors import EagleError
from eagle_graphs.manifest import Manifest
from eagle_graphs.ports import GraphPorts, KVGeometry, Port, draft_ports, draft_round_ports, target_ports
from eagle_graphs.profiles import Profile, paths_from_json, profile_from_nodes, profiles_from_text, static_profile
from eagle_graphs.tree import Candidates, Tree, cut, rerank, root_only, tree_from_parents

__all__ = [
    "Candidates",
    "EagleError",
    "GraphPorts",
    "KVGeometry",
    "Manifest",
    "Port",
    "Profile",
    "Tree",
    "cut",
    "draft_ports",
    "draft_round_ports",
    "paths_from_json",
    "profile_from_nodes",
    "profiles_from_text",
    "rerank",
    "root_only",
    "static_profile",
    "target_ports",
    "tree_from_parents",
]
