"""The gateway, without I/O: accepts requests, assigns attempts to nodes, answers each request once.

`gateway.Gateway` serves nodes of one process; `network_gateway.NetworkGateway` serves nodes behind
an unreliable network, and `node_reporter.NodeReporter` is the end of a node.
"""
