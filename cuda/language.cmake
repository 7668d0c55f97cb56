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

# A program for the device: nothing where there is no CUDA compiler. KERNELS are its CUDA sources.
function(add_device_program name)
  if(NOT CMAKE_CUDA_COMPILER)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 1 program "" "" "KERNELS;SOURCES;LIBRARIES;DEFINITIONS")
  add_executable(${name} ${program_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/core)
  target_compile_definitions(${name} PRIVATE ${program_DEFINITIONS})
  target_link_libraries(${name} PRIVATE kvreplay_options kvreplay_devices kvreplay_attention kvreplay_trace
                                        kvreplay_core OpenMP::OpenMP_CXX ${program_LIBRARIES})
  if(program_KERNELS)
    # On their own: the options of kvreplay_options are not nvcc's.
    add_library(${name}_kernels OBJECT ${program_KERNELS})
    target_include_directories(${name}_kernels PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/core)
    target_compile_options(${name}_kernels PRIVATE --expt-relaxed-constexpr)
    target_link_libraries(${name}_kernels PRIVATE CUDA::cudart_static)
    target_link_libraries(${name} PRIVATE $<TARGET_OBJECTS:${name}_kernels>)
  endif()
endfunction()

# The same for suites, one test of ctest: it is skipped, with the driver's reason, where there is no device.
function(add_device_tests name)
  add_device_program(${name} ${ARGN})
  if(TARGET ${name})
    add_test(NAME cuda.device COMMAND ${name} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    set_tests_properties(cuda.device PROPERTIES SKIP_RETURN_CODE 4)
  endif()
endfunction()
