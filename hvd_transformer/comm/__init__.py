"""The world of ranks and its collectives: the only room that imports horovod or mpi4py."""
