"""The world of ranks and its collectives: the only package that imports horovod or mpi4py."""
