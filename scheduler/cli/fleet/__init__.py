"""`radixkv serve --ray`: prefill and decode nodes as actors of a Ray cluster.

`Fleet` starts and ends them, `actors` is what runs in their processes, `registry` is the actor
where they find the server, `roster` says which nodes are missing, and `scale` is the command
`radixkv fleet scale`. Ray places the nodes, starts them again when they die, and tells them where
the registry is.
"""
