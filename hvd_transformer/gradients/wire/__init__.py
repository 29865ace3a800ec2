"""The wire: the number format in which gradients travel between replicas, where they are summed, and by whom.

    communication.compression   module     in transit
    none                        plain      the buffers' own format, summed by Horovod
    fp16, fp16_fp32_sum         fp16       float16 with a scale per buffer, summed by Horovod or by the ranks
    int8, int4                  quantized  8 or 4 bits with a scale per block (`blocks`), summed by the ranks
    powersgd                    powersgd   factors of low rank, summed by Horovod
    auto                        choice     one of them, by what the link measures

`feedback` has the errors of formats that lose something, which the next step sends.
"""
