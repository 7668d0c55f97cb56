# CUDA is used where its compiler is found. Sanitizers and compilers that it does not know go without.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_CROSSCOMPILING AND NOT KVREPLAY_SANITIZE)
  include(CheckLanguage)
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # Hopper alone for day-to-day builds; what is released has -DCMAKE_CUDA_ARCHITECTURES="80;86;89;90a;100;120".
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 90a)
    endif()
    enable_language(CUDA)
    if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")  # CMake 3.25 does not know that nvcc has it
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    find_package(CUDAToolkit REQUIRED)
  endif()
endif()
