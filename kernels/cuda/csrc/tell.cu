// What the host is to know of a step, to page-locked memory. A copy by the copy engine would do as
// well, but kernels and that engine wait several microseconds for each other.

// grid: (words / 256), 256 threads
extern "C" __global__ void __launch_bounds__(256)
    tell_host(const unsigned* from, unsigned* to, int words) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < words) to[i] = from[i];
}
