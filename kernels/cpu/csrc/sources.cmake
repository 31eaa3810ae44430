# The sources of the matrix products and the flags of each instruction set. Needs `csrc`.
set(matmul_sources
  "${csrc}/matmul.cpp" "${csrc}/experts.cpp" "${csrc}/matmul_isa.cpp" "${csrc}/matmul_unpack.cpp"
  "${csrc}/codebooks.cpp"
  "${csrc}/gemm_plain.cpp" "${csrc}/gemm_avx2.cpp" "${csrc}/gemm_avx512.cpp")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set_source_files_properties("${csrc}/gemm_avx2.cpp" PROPERTIES
    COMPILE_OPTIONS "-mavx2;-mfma;-mf16c")
  # gcc 12 warns about its own intrinsics (its bug 105593)
  set_source_files_properties("${csrc}/gemm_avx512.cpp" PROPERTIES COMPILE_OPTIONS
    "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx512vnni;-mfma;-mf16c\
;-Wno-uninitialized;-Wno-maybe-uninitialized")
endif()
