// Which of the compiled instruction sets this processor can run, and the version of the C interface.
extern "C" {

int kvr_abi() { return 1; }

int kvr_can_run_generic() { return 1; }

#if defined(__x86_64__)
int kvr_can_run_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
int kvr_can_run_avx512() { return __builtin_cpu_supports("avx512f") && kvr_can_run_avx2(); }
#endif
}
